"""What a trial leaves for people and for build servers: pages, JUnit, and an index over many trials."""
