"""The model that verifies: what it can do, its forwards over trees and chains, its caches."""
