"""The methods, one file each: what to keep when a layer holds too much. Copy the nearest one to add another."""
