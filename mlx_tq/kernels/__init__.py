"""Operations on packed KV rows: GPU kernels, and a reference implementation of each in mlx operations."""
