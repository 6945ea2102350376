"""Votes over shifts: how answers are combined, which shifts are asked, and what answers by a vote."""
