"""What features of ours cost, one question a file, and the counts that CI compares. The peers are in `kvledger bench`.

scripts/reference_python.sh compiled -m benchmarks.bench_events      beside vLLM's events
python -m benchmarks.bench_watching
python -m benchmarks.bench_why_miss
scripts/check_counts.sh
"""
