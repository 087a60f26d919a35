"""What do I need? Users and a context -> the fewest cards of each kind that hold them, each computed by planning.

A user is one request of `context` tokens that is being answered; all users at a time, so that nobody waits for blocks.
For each card the smallest replica is looked for that holds a request, over tensor and pipeline ranks, and as many of it
as the users take. Every size is tried, because larger replicas keep less for weights on each card.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil

from kvledger.errors import ConfigError, wrong_value
from kvledger.plan.ask import Asked, build_request
from kvledger.plan.counts import parse_count, parse_number
from kvledger.plan.gpus import find_gpu
from kvledger.plan.options import AUTO_LENGTH, EngineOptions
from kvledger.plan.plan import Plan, make_plan
from kvledger.plan.refusal import RefusedError
from kvledger.plan.request import request_holding
from kvledger.plan.view import block_range
from kvledger.plan.work import JSONValue

# Cards that are looked at where none is named.
CARDS = (
    "RTX 4090", "RTX 5090", "L4", "A10", "L40S", "RTX PRO 6000", "A100-40GB", "A100", "H100", "H200", "B200", "MI300X",
)  # fmt: skip
# Cards of a replica, tensor ranks first: (tensor, pipeline).
REPLICAS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (4, 2), (8, 2))
# Replicas that share their experts, where those are parallel.
EXPERT_REPLICAS = (1, 2, 4, 8, 16, 32)
# Options that say what is asked here.
ASKED_HERE = ("data_parallel_size", "kv_cache_memory_bytes", "num_gpu_blocks_override")
# What a command line of vLLM says in another way.
NOT_OPTIONS = ("entry_point", "pipeline_layers", "cudagraph_mode", "allow_long_max_model_len")
# More cards than that are no answer.
MOST_CARDS = 512


@dataclass(frozen=True)
class Need:
    """So many requests of `context` tokens at a time."""

    users: int
    context: int


def parse_need(text: str) -> Need:
    """users=200,context=32k. ConfigError says what is missing or not known."""
    values: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("users", "context") or not equals:
            problem = f"{part.strip()!r} is not users=N or context=N"
            raise wrong_value("--need", text, problem, "give users=200,context=32k")
        values[name] = parse_count(f"--need {name}", value)
    for name in ("users", "context"):
        if values.get(name, 0) < 1 + (name == "context"):
            raise wrong_value("--need", text, f"{name} is missing or too small", "give users=200,context=32k")
    return Need(**values)


def parse_prices(text: str) -> dict[str, float]:
    """H100=2.5,L4=0.7: the price of a card, by its name in the table."""
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise wrong_value("--prices", text, f"{part.strip()!r} is not CARD=PRICE", "give H100=2.5,L4=0.7")
        price = parse_number(f"--prices {name}", value)
        if price <= 0:
            raise wrong_value("--prices", text, f"{name} costs nothing", "give a positive price")
        prices[find_gpu(name).name] = price
    return prices


@dataclass(frozen=True)
class Answer:
    """One way to serve the need: `units` times what is planned, which is one replica or those that share experts.

    `users`: that fit at a time, by blocks and by max_num_seqs, over all replicas; `surely`: of them, at the low end of
    the memory estimate. `longest`: tokens of the longest request that a replica takes. `price`: of all cards, None
    where it is not known.
    """

    plan: Plan
    need: Need
    units: int
    users: int
    surely: int
    longest: int
    price: float | None

    @property
    def card(self) -> str:
        return self.plan.request.gpu.name

    @property
    def replicas(self) -> int:
        return self.units * self.plan.request.options.data_parallel_size

    @property
    def num_cards(self) -> int:
        return self.plan.request.options.world_size * self.replicas

    @property
    def margin(self) -> float:
        """Share of the users that would fit besides."""
        return self.users / self.need.users - 1


def answers(asked: Asked, need: Need, prices: Mapping[str, float]) -> list[Answer]:
    """The best way on each card, ranked: the cheapest first where prices are known, else the fewest cards, then the
    least memory. ConfigError with the reason where no card holds one request.
    """
    for name in ASKED_HERE:
        if name in asked.given:
            option = "--" + name.replace("_", "-")
            raise wrong_value(option, getattr(asked.options, name), "--need finds it out", "leave it out")
    reasons: list[str] = []
    found = [best_on(replace(asked, gpu=name), need, prices, reasons) for name in cards_of(asked)]
    ranked = sorted((way for way in found if way is not None), key=rank)
    if not ranked:
        raise ConfigError(f"no card of {', '.join(cards_of(asked))} holds it: {reasons[-1]}")
    return ranked


def rank(answer: Answer) -> tuple[bool, float, int, int]:
    memory = answer.num_cards * answer.plan.request.gpu.total_bytes
    return answer.price is None, answer.price or 0.0, answer.num_cards, memory


def cards_of(asked: Asked) -> Sequence[str]:
    return asked.gpu.split(",") if asked.gpu else CARDS


def best_on(asked: Asked, need: Need, prices: Mapping[str, float], reasons: list[str]) -> Answer | None:
    """The fewest of one kind of card, of those the way with the fewest stages, and of those the one with most users;
    None, and a reason, where none serves.
    """
    best = min(ways_on(asked, need, reasons), key=preference, default=None)
    if best is None:
        return None
    price = prices.get(best.card)
    freely = replace(best.plan.request.options, max_model_len=AUTO_LENGTH)
    longest = make_plan(replace(best.plan.request, options=freely)).max_model_len
    return replace(best, longest=longest, price=None if price is None else price * best.num_cards)


def preference(way: Answer) -> tuple[int, int, int]:
    return way.num_cards, way.plan.request.options.pipeline_parallel_size, -way.users


def ways_on(asked: Asked, need: Need, reasons: list[str]) -> Iterator[Answer]:
    """Every size of a replica that holds a request, as many times as the users take."""
    for tensor, pipeline, data in sizes_of(asked):
        options = replace(
            asked.options,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            data_parallel_size=data,
            max_model_len=asked.options.max_model_len or need.context,
        )
        try:
            plan = make_plan(build_request(replace(asked, options=options)))
        except RefusedError as refused:
            reasons.append(refused.refusal.message)
            continue
        if plan.error is not None or plan.keeps_nothing:
            reasons.append(plan.error.message if plan.error else "the model keeps no KV cache")
            continue
        way = serve(plan, need)
        if way is not None:
            yield way
        else:
            reasons.append(f"it takes more than {MOST_CARDS} cards")


def sizes_of(asked: Asked) -> Iterator[tuple[int, int, int]]:
    """Tensor ranks, pipeline stages and replicas that share experts: those that were given, else all."""
    given = asked.given & {"tensor_parallel_size", "pipeline_parallel_size"}
    sizes = ((asked.options.tensor_parallel_size, asked.options.pipeline_parallel_size),) if given else REPLICAS
    for tensor, pipeline in sizes:
        for data in EXPERT_REPLICAS if asked.options.enable_expert_parallel else (1,):
            yield tensor, pipeline, data


def serve(plan: Plan, need: Need) -> Answer | None:
    """As many replicas of this plan as the users take."""
    options, seats = plan.request.options, plan.settings.max_num_seqs
    holding = request_holding(plan, need.context - 1, 1)
    each = min(holding.at_a_time, seats) * options.data_parallel_size
    if each < 1 or plan.max_model_len < need.context:
        return None
    units = ceil(need.users / each)
    if units * options.world_size * options.data_parallel_size > MOST_CARDS:
        return None
    low = min(max(0, (block_range(plan)[0] - 1) // holding.blocks), seats) * options.data_parallel_size
    return Answer(plan, need, units, each * units, low * units, plan.max_model_len, None)


def answers_object(ranked: Sequence[Answer], notes: Sequence[str], unmodelled: Sequence[str]) -> dict[str, JSONValue]:
    """The need, and its answers from the best on."""
    need = ranked[0].need
    return {
        "model": ranked[0].plan.facts.name,
        "vllm_version": ranked[0].plan.request.rules.name,
        "need": {"users": need.users, "context": need.context},
        "answers": [answer_object(answer) for answer in ranked],
        "notes": list(notes),
        "not_modelled": list(unmodelled),
    }


def answer_object(answer: Answer) -> dict[str, JSONValue]:
    options, plan = answer.plan.request.options, answer.plan
    return {
        "gpu": answer.card,
        "num_gpus": answer.num_cards,
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "data_parallel_size": answer.replicas,
        "num_blocks": plan.num_blocks,
        "max_num_seqs": plan.settings.max_num_seqs,
        "estimated_max_model_len": answer.longest,
        "users": answer.users,
        "users_low": answer.surely,
        "margin": answer.margin,
        "price": answer.price,
        "command": command(answer),
    }


def command(answer: Answer) -> str:
    """What starts it, with what else was asked."""
    options = answer.plan.request.options
    sized = replace(options, data_parallel_size=answer.replicas, max_model_len=answer.plan.max_model_len)
    words = ["vllm serve", answer.plan.facts.name]
    for option in fields(EngineOptions):
        value = getattr(sized, option.name)
        if value != option.default and option.name not in NOT_OPTIONS:
            words.append(words_of(option.name.replace("_", "-"), value))
    return " ".join(words)


def words_of(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
