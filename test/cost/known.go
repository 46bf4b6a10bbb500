package main

import "regexp"

// accepted is a finding that is accepted for a reason.
type accepted struct {
	// shape matches "family: name", and kind matches the finding's kind, or "kind of form".
	shape, kind *regexp.Regexp
	reason      string
}

// known are the findings that are accepted. Each reason names the cause.
var known = []accepted{
	because(
		"object: Pod of 25,000 variables|definition: 50 versions of 150 properties|"+
			"definition: objects of a large schema|definition: objects of 9,000 levels|"+
			"conversion: a webhook that grows objects to 1 MB|list: 10,000 label terms|"+
			"JSON Patch: 9,000 insertions at the front of an array|body: protobuf of 5,000 containers|"+
			"HTTP/2: answers that are not read|HTTP/2: a window of one byte",
		"left",
		"The history of recent events keeps the events of the shape's objects. It is bounded: 32 MB for each resource "+
			"(--watch-ring-bytes), in two encodings, and in `split` in each of two replicas.",
	),
	because(
		"definition: a schema of 8,000 properties|definition: 50 versions of 150 properties",
		"left|peak",
		"Each registry and each gateway builds the schemas and the OpenAPI documents of a version, in `split` "+
			"two of each.",
	),
	because(
		"definition: a definition that changes 20 times",
		"status",
		"kube-apiserver answers some requests with 429 while it replaces the storage of the CRD; Watershed "+
			"answers all.",
	),
	because("conversion: a webhook that answers 100 MB", "status",
		"kube-apiserver reads the response until its client gives up; Watershed rejects it after 16 MB."),
	because("conversion: a webhook that grows objects to 1 MB", "peak",
		"The registry sends the converted objects to the watch tier in two encodings. The response of a webhook is "+
			"bounded: 16 MB and 4 times its request."),
	because(
		"object: ConfigMap of 1 MB|list: 10,000 label terms",
		"peak",
		"The figure of `split` is the sum of its processes: gateway, registry, publisher, NATS and two replicas "+
			"each have a copy in flight.",
	),
	because(
		"watch: 200 of revisions that are too old or in the future",
		"cpu|peak",
		"The event log still has events that kube-apiserver's watch cache has dropped. 150 of the watches "+
			"receive up to 15 MB of events each, instead of a 410. Backfills are bounded: 8 MB each and 128 MB in all.",
	),
	because(
		"watch: 1,000 on one connection",
		"status|peak",
		"kube-apiserver rejects a part of the watches with 429 while they initialize. Watershed serves all in "+
			"`split`, and more of them in `up`.",
	),
	because(
		"watch: .*unread.*, 20 updates of 900 kB|HTTP/1.1: 300 strangers' paths of 900 kB, dropped",
		"peak",
		"The figure of `split` is the sum of its processes, and each has a bound: 32 MB of large events in "+
			"flight in a replica, 32 MB of unsent events for a user in a gateway, and 1 MB of headers for a "+
			"request. The rest is garbage until the next collection.",
	),
	because(
		"HTTP/2: rapid resets of lists",
		"cpu",
		"A list of `split` calls a replica before the reset arrives. The connection is closed at 400 waiting handlers.",
	),
	because("aggregation: discovery .*", "goroutines",
		"The gateway still reads the hostile server, for at most 5 s, when the shape ends."),
	because(
		"(object|definition|watch|HTTP/1.1|HTTP/2|upgrade): .*",
		"goroutines of split",
		"10 s after its start a gateway of `split` counts its peers and starts a flow controller with its "+
			"share of the seats. The former controller drains for a minute. gRPC servers start workers with load.",
	),
}

// because returns an accepted finding. shape and kind are whole patterns.
func because(shape, kind, reason string) accepted {
	return accepted{regexp.MustCompile("^(?:" + shape + ")$"), regexp.MustCompile("^(?:" + kind + ")$"), reason}
}

// reasonOf returns the reason for accepting a finding, or "" if there is no reason.
func reasonOf(f finding) string {
	for _, k := range known {
		if k.shape.MatchString(f.shape.String()) &&
			(k.kind.MatchString(f.kind) || k.kind.MatchString(f.kind+" of "+f.form)) {
			return k.reason
		}
	}
	return ""
}
