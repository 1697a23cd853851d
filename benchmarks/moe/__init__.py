"""The MoE layer: ours, the sum of its grouped matmuls, what users write without it, and torch's."""
