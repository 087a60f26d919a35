"""Ours against vLLM's, one question a file. Run: scripts/reference_python.sh compiled -m benchmarks"""
