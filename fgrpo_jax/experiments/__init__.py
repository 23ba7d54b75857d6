"""The paper's studies, each a command that draws its figure."""
