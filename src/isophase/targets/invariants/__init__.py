"""What must hold in any target before a phase is blamed."""
