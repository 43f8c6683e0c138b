"""What travels in a row beside bf16: fp8, mxfp8 and nvfp4 with their scales, and scales in the tiles of block-scaled
grouped GEMMs."""
