"""The arguments that every measurement takes."""

import argparse
from pathlib import Path

import torch


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    return made
