package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
)

// TestARepeatedCreateFindsItsObject checks that a rejected request and a create of unknown result are sent again. The
// response of the create is not compared, and later requests have the version of its object.
func TestARepeatedCreateFindsItsObject(t *testing.T) {
	var got []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		got = append(got, req.Method+" "+req.URL.Path)
		w.Header().Set("Content-Type", "application/json")
		switch len(got) {
		case 1:
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
		case 2:
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, `{"message":"Internal error occurred: etcdserver: request timed out"}`)
		case 3:
			w.WriteHeader(http.StatusConflict)
			fmt.Fprint(w, `{"reason":"AlreadyExists","details":{"name":"a"}}`)
		default:
			fmt.Fprint(w, `{"metadata":{"name":"a","uid":"u","resourceVersion":"7"}}`)
		}
	}))
	defer s.Close()
	of := &side{
		name: "a server", base: s.URL, client: s.Client(), seen: map[string]identity{},
		clients: map[clientKey]*http.Client{{nil, true}: s.Client()},
	}
	p := &pair{t: t, report: newReport(nil)}
	r := &request{method: http.MethodPost, path: "/pods?dryRun="}
	a := of.do(t.Context(), r)
	p.repeats(r, answer{code: http.StatusCreated}, a)
	p.report.compare(r, answer{code: http.StatusCreated, header: http.Header{"Theirs": {"yes"}}}, a)
	want := []string{"POST /pods", "POST /pods", "POST /pods", "GET /pods/a"}
	if !slices.Equal(got, want) || !r.repeated || !r.lost || a.code != http.StatusCreated {
		t.Errorf("requests %q, repeated %v, lost %v, code %d", got, r.repeated, r.lost, a.code)
	}
	if of.seen["/pods/a"].version != "7" || len(p.report.unexplained) > 0 {
		t.Errorf("version %q, differences %v", of.seen["/pods/a"].version, p.report.unexplained)
	}
}
