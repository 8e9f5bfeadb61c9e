"""The step loop that joins scheduler and executor, its process, and the client of that process."""
