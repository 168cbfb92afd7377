"""Of the stand-in."""


class current_platform:
    @staticmethod
    def is_cpu() -> bool:
        return False
