"""What runs inside the process of a vLLM engine, in the environment that `vllm_env.py` makes."""
