"""From autograd's hooks to reduced gradients: buckets, their order, and their collectives."""
