"""A KV-cache tier for hybrid-attention LLMs."""

from kvquilt.hits import Hit, longest_hit
from kvquilt.layout import CacheGroup, CacheLayout, needed_blocks
from kvquilt.sizing import SlotPlan, plan_slots

__all__ = ["CacheGroup", "CacheLayout", "Hit", "SlotPlan", "longest_hit", "needed_blocks", "plan_slots"]
