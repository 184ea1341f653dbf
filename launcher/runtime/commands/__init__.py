"""Hold what every command shares: its parser, its errors, interrupts, progress, shell completion."""
