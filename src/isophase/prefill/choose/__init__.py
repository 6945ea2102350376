"""What decides how much a head reads: the adaptive mode, tables, the offline search, the price of it all."""
