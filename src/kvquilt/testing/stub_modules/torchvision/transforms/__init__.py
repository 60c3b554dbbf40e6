"""Names that are imported and never used by a text model."""


class InterpolationMode:
    """Stands for torchvision's enumeration."""
