"""The one place that decides: batches, chunk sizes, slots, pages, aborts. It imports no torch and does no I/O."""
