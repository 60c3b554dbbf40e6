"""Layouts of known models from their config.json."""

from kvquilt.layout.catalog.build import GroupFacts, ModelLayout, known_model_types, layout_from_config

__all__ = ["GroupFacts", "ModelLayout", "known_model_types", "layout_from_config"]
