"""What each module's precision is worth, and the precision plan that follows. docs/sensitivity.md."""
