"""Machine and processes: memory, locks, directories, native builds."""
