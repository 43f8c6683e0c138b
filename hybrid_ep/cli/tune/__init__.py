"""`hybrid-ep tune`: which blocks and chunks are best here, and what they are better than."""
