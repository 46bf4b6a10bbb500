package main

import "regexp"

// accepted is a finding that is accepted for a reason.
type accepted struct {
	// shape matches "family: name", and kind matches the finding's kind.
	shape, kind *regexp.Regexp
	reason      string
}

// known are the findings that are accepted. Each reason names the cause.
var known = []accepted{
	because("(object|body|list|JSON Patch|merge patch|apply|definition|conversion|HTTP/2): .*", "left",
		"The history of recent events keeps the events of the shape's objects. It is bounded: 32 MB for each resource "+
			"(--watch-ring-bytes), in two encodings, and in `split` in each of two replicas."),
	because("definition: .*", "left|peak",
		"Each registry and each gateway builds the schemas and the OpenAPI documents of a version, in `split` two of each."),
	because("definition: a definition that changes 20 times", "status",
		"kube-apiserver answers some requests with 429 while it replaces the storage of the CRD; Watershed answers all."),
	because("conversion: a webhook that answers 100 MB", "status",
		"kube-apiserver reads the response until its client gives up; Watershed rejects it after 16 MB."),
	because("conversion: a webhook that grows objects to 1 MB", "peak",
		"The registry sends the converted objects to the watch tier in two encodings. The response of a webhook is "+
			"bounded: 16 MB and 4 times its request."),
	because("watch: 200 of revisions that are too old or in the future", "cpu|peak",
		"The event log still has events that kube-apiserver's watch cache has dropped. 150 of the watches receive up to "+
			"15 MB of events each, instead of a 410. Backfills are bounded: 8 MB each and 128 MB in all."),
	because("aggregation: discovery .*", "goroutines",
		"The gateway still reads the hostile server, for at most 5 s, when the shape ends."),
}

// because returns an accepted finding. shape and kind are whole patterns.
func because(shape, kind, reason string) accepted {
	return accepted{regexp.MustCompile("^(?:" + shape + ")$"), regexp.MustCompile("^(?:" + kind + ")$"), reason}
}

// reasonOf returns the reason for accepting a finding, or "" if there is no reason.
func reasonOf(f finding) string {
	for _, k := range known {
		if k.shape.MatchString(f.shape.String()) && k.kind.MatchString(f.kind) {
			return k.reason
		}
	}
	return ""
}
