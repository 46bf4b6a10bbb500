package main

import "regexp"

// accepted is a finding that is accepted for a reason.
type accepted struct {
	// shape matches "family: name", and kind matches the finding's kind.
	shape, kind *regexp.Regexp
	reason      string
}

// known are the findings that are accepted. Each reason names the cause.
var known = []accepted{}

// reasonOf returns the reason for accepting a finding, or "" if there is no reason.
func reasonOf(f finding) string {
	for _, k := range known {
		if k.shape.MatchString(f.shape.String()) && k.kind.MatchString(f.kind) {
			return k.reason
		}
	}
	return ""
}
