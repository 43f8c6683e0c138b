"""`hybrid-ep report`: tables made of what runs left behind, or of predictions."""
