"""`fastload replay`: the rows, images and tensors of a step, from a checkpoint alone."""
