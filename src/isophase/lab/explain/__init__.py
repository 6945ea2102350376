"""Where in a model its phase effect comes from: heads, gates, causes; and the page that shows it."""
