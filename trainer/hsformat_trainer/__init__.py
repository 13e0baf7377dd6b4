"""The EAGLE-3 trainer that refuses data which does not mean what the serving engines will do with the draft."""
