"""`hybrid-ep doctor`: what this machine, or every pair of ranks of a job, has and lacks."""
