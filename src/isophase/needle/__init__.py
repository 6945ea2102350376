"""A fact in a long text: lengths by depths by phases, for several cache methods on one reading."""
