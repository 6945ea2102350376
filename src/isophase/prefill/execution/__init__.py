"""What carries a plan out: masks, plans, executors, threads."""
