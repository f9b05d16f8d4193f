"""Programs as their instructions: jaxprs, and what compilers for TPUs and GPUs make of them."""
