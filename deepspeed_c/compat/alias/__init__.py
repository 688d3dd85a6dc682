"""deepspeed_c under the name ``deepspeed``, for packages that import that name: nothing here loads torch."""
