"""The connector for an unmodified vLLM: `kv_connector_module_path="kvquilt.vllm"`."""

from kvquilt.vllm.connector import KVQuiltConnector

__all__ = ["KVQuiltConnector"]
