"""The side of the workers, where the KV tensors live: block tables and slots, without torch."""

from kvledger.core.tables.block_table import BlockTable
from kvledger.core.tables.block_tables import BlockTables
from kvledger.core.tables.slots import NO_SLOT, slot_mapping
from kvledger.core.tables.step_table import step_table

__all__ = ["NO_SLOT", "BlockTable", "BlockTables", "slot_mapping", "step_table"]
