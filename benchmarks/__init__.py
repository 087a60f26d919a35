"""What things cost: against peers, each feature of ours (one question a file), and the counts that CI compares.

python -m benchmarks.peers
scripts/reference_python.sh compiled -m benchmarks.bench_events      beside vLLM's events
python -m benchmarks.bench_watching
python -m benchmarks.bench_why_miss
scripts/check_counts.sh
"""
