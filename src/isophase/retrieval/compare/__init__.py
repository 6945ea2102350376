"""Which vectors find answers best in one's own documents."""
