"""Numbers of machines that the runtime and the performance model both read, each with its source; and how many ranks a
token needs. Imports nothing of hybrid_ep."""
