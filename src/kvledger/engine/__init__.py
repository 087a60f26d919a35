"""An engine around the scheduler: small enough to be read first, and to be the start of your own."""

from kvledger.engine.engine import Drafter, Engine, NewTokens, OnStep, OnTokens, Worker
from kvledger.engine.sampling_params import GREEDY, SamplingParams
from kvledger.engine.stats import EngineStats

__all__ = ["GREEDY", "Drafter", "Engine", "EngineStats", "NewTokens", "OnStep", "OnTokens", "SamplingParams", "Worker"]
