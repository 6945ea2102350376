"""An audit: plan, ask resumably, assess, report."""
