"""`lmkit quantize`: a checkpoint whose linears are rounded, in the format of compressed-tensors."""
