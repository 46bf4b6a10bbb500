// This file lets the compiler accept lookupRaftNode, which has no body.
