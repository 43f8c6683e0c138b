"""`hybrid-ep simulate`: what an exchange would take on a cluster that is not here."""
