"""A small trace of each format, of the shape that its publisher documents; the numbers are made up."""

# ruff: noqa: E501 (a record a line)

import json
from typing import Any

from tests.unit.traces.recordings import agent_request, mooncake, session


def line(**fields: Any) -> str:
    return json.dumps(fields)


BAILIAN = [
    line(
        chat_id=159,
        parent_chat_id=-1,
        timestamp=61.0,
        input_length=40,
        output_length=9,
        type="text",
        turn=1,
        hash_ids=[7, 8, 9],
    ),
    line(
        chat_id=200,
        parent_chat_id=-1,
        timestamp=62.5,
        input_length=16,
        output_length=2,
        type="file",
        turn=1,
        hash_ids=[7],
    ),
    line(
        chat_id=160,
        parent_chat_id=159,
        timestamp=161.0,
        input_length=64,
        output_length=5,
        type="text",
        turn=2,
        hash_ids=[7, 8, 10, 11],
    ),
]
AZURE_2023 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:17:03.9799600,4808,10",
    "2023-11-16 18:17:04.0319600,3180,8",
]
AZURE_2024 = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2024-05-10 00:00:00.009930+00:00,2162,5",
    "2024-05-10 00:00:01+00:00,10,0",
]
BURSTGPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,0,0,0,Conversation log",
    "118,GPT-4,417,276,693,API log",
]
BURSTGPT_SESSIONS = [
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "0,a,4,ChatGPT,20,18,38,Conversation log",
    "5,b,1,ChatGPT,30,2,32,Conversation log",
    "10,a,2,GPT-4,60,6,66,Conversation log",
]
TIMED = [
    line(timestamp=0.5, input_length=40, output_length=9, hash_ids=[1, 2, 3]),
    line(timestamp=100.5, input_length=32, output_length=9, hash_ids=[1, 2]),
]
SESSION_ROWS = [
    line(session_id="a", timestamp=1000, input_length=600, output_length=20, hash_ids=[1, 2]),
    line(session_id="b", timestamp=1500, input_length=100, output_length=20),
    line(session_id="a", delay=2000, input_length=700, output_length=30, hash_ids=[1, 5]),
]
DYNAMO = [
    line(
        schema="dynamo.request.trace.v1",
        event_type="request_end",
        event_time_unix_ms=1777312809000,
        agent_context={"session_id": "run-42"},
        request={
            "request_id": "second",
            "request_received_ms": 1777312808000,
            "output_tokens": 4,
            "replay": {"trace_block_size": 64, "input_length": 130, "input_sequence_hashes": [14879255164371896291, 5, 6]},
        },
    ),
    line(schema="dynamo.request.trace.v1", event_type="tool_end", event_time_unix_ms=1777312801500, tool={"tool_class": "x"}),
    line(
        timestamp=12,
        event={
            "schema": "dynamo.request.trace.v1",
            "event_type": "request_end",
            "agent_context": {"session_id": "run-42"},
            "request": {
                "request_received_ms": 1777312800000,
                "total_time_ms": 1000,
                "output_tokens": 16,
                "replay": {"trace_block_size": 64, "input_length": 64, "input_sequence_hashes": [14879255164371896291]},
            },
        },
    ),
]  # fmt: skip
LITELLM = [
    line(startTime="2026-05-01T10:00:00.500+00:00", endTime="2026-05-01T10:00:02.500+00:00", prompt_tokens=70, completion_tokens=12,
         prefix_block_hashes=["9f2c", "01ab"], session_id="s", block_size=32),
    line(startTime="2026-05-01T10:00:05.500Z", prompt_tokens=64, completion_tokens=0, prefix_block_hashes=["9f2c", "77"], session_id="s", block_size=32),
]  # fmt: skip
UNTIMED = [
    line(block_size=64, hash_ids=[2001, 2002], input_length=128),
    line(block_size=64, hash_ids=[2001], input_length=100),
]
# A turn of 17 tokens, and 17 more behind an answer of 4; a history that is whole in each row; a row of its own.
AIPERF_TEXTS = [
    line(session_id="a", timestamp=0, text_input="a b c d e f g h i j k l m n o p q", output_length=4),
    line(session_id="b", timestamp=500, messages=[{"role": "user", "content": "a " * 20}], output_length=9),
    line(session_id="a", delay=2000, text_input="a b c d e f g h i j k l m n o p q", output_length=2),
    line(session_id="b", timestamp=2500, output_length=2, messages=[
        {"role": "user", "content": "a " * 20}, {"role": "assistant", "content": "z"}, {"role": "user", "content": "b"}]),
    line(session_id="c", message_mode="delta", messages=[{"role": "user", "content": "a"}], output_length=2),
    line(session_id="c", message_mode="delta", messages=[{"role": "user", "content": "b"}], output_length=2, delay=1),
    line(timestamp=9000, text_input="x"),
]  # fmt: skip
SHAREGPT = [
    line(id="x", conversations=[{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e"},
                                {"from": "human", "value": "f"}, {"from": "gpt", "value": "g"}]),
    line(id="y", conversations=[{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "h"}]),
]  # fmt: skip
WILDCHAT = [
    line(conversation_hash="1", timestamp="2024-01-01T00:00:10+00:00", conversation=[
        {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]),
    line(conversation_hash="2", timestamp="2024-01-01T00:00:40+00:00", conversation=[
        {"role": "user", "content": "f"}, {"role": "assistant", "content": "g"}]),
]  # fmt: skip
OPENAI_BATCH = [
    line(custom_id="1", method="POST", url="/v1/chat/completions", body={
        "model": "m", "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b c"}]}],
        "max_tokens": 20}),
    line(custom_id="2", method="POST", url="/v1/completions", body={"prompt": "a b c", "max_completion_tokens": 3}),
]  # fmt: skip
KV_EVENTS = [
    line(seq=0, ts=10.0, events=[
        {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [0] * 8, "block_size": 4,
         "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0},
        {"type": "BlockStored", "block_hashes": [91], "parent_block_hash": None, "token_ids": [0] * 8, "block_size": 8, "group_idx": 1}]),
    line(seq=1, ts=11.0, events=[{"type": "BlockStored", "block_hashes": [3], "parent_block_hash": 2, "token_ids": [0] * 4, "block_size": 4}]),
    line(seq=2, ts=500.0, events=[{"type": "BlockStored", "block_hashes": [4, 5], "parent_block_hash": 1, "token_ids": [0] * 8, "block_size": 4},
                                  {"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}, {"type": "AllBlocksCleared"}]),
]  # fmt: skip
OURS = [
    line(format="kvledger.trace", version=1, block_size=16, source="a server"),
    '{"t": 0.25, "in": 40, "out": 12, "ids": [1, 2], "scope": 3, "session": 1}',
    '{"t": 1.5, "in": 32, "out": 1, "ids": [1, 2], "scope": 3, "session": 1, "think": 0.5, "priority": -1}',
    '{"t": 2, "in": 512, "out": 3, "ids": [9], "block": 512, "new_field": 1}',
]
# Rows in the order in which the requests ended: what arrived before 3 s is complete, what arrived later is not.
OURS_FINISHED = [
    line(format="kvledger.trace", version=1, block_size=16, start=1000.0, ids="run 7", order="finish"),
    '{"t": 1, "in": 20, "out": 3, "ids": [1], "session": 2, "first": 1.5, "end": 2.5, "finish": "stop"}',
    '{"t": 0.5, "in": 40, "out": 90, "ids": [1, 2], "first": 1, "end": 2.75, "hit": 16, "step": 4}',
    '{"done": 3}',
    '{"t": 4, "in": 20, "out": 3, "ids": [1], "session": 2, "end": 9}',
    '{"t": 3.5, "in": 16, "out": 3, "ids": [5], "end": 10}',
]
# The same server a minute later, and another one, which numbers for itself.
OURS_ROTATED = [
    line(format="kvledger.trace", version=1, block_size=16, start=1060.0, ids="run 7"),
    '{"t": 0, "in": 16, "out": 1, "ids": [1], "session": 2}',
]
OURS_OTHER = [
    line(format="kvledger.trace", version=1, block_size=32, start=1030.0),
    '{"t": 1, "in": 32, "out": 1, "ids": [1], "session": 2}',
]
MOONCAKE = [mooncake(0), mooncake(10), mooncake(20, 1000, 3, [0, 7])]
AGENT = [
    session(agent_request(0, 130, [1, 2]), agent_request(5, 200, [1, 2, 3])),
    session(
        agent_request(0, 64, [9], think_time=1.0), {"t": 1, "type": "subagent", "requests": [agent_request(0, 70, [4])]}
    ),
]

# Format -> its sample.
SAMPLES = {
    "mooncake": MOONCAKE,
    "timed-trace": TIMED,
    "mooncake-sessions": SESSION_ROWS,
    "aiperf": SESSION_ROWS,
    "agent": AGENT,
    "azure": AZURE_2024,
    "bailian": BAILIAN,
    "burstgpt": BURSTGPT_SESSIONS,
    "dynamo": DYNAMO,
    "litellm": LITELLM,
    "kvcache-simulator": UNTIMED,
    "sharegpt": SHAREGPT,
    "wildchat": WILDCHAT,
    "openai-batch": OPENAI_BATCH,
    "kv-events": KV_EVENTS,
    "kvledger": [*OURS_FINISHED, *OURS_ROTATED],
}
TEXTS = ("sharegpt", "wildchat", "openai-batch")
# Formats that cannot be told apart by a record.
ASKED_FOR = ("timed-trace", "mooncake-sessions", "aiperf")
