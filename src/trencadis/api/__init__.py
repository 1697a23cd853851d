"""What a user calls: grouped matmuls (`matmul`), their names in lax (`lax`), and the general GEMM (`gemm`)."""
