"""Everything that renders: tables and plots on a terminal, HTML pages, figures."""
