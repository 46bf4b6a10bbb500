package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
)

// TestKnownDifferencesAreNarrow checks that each pattern names its request and its difference: it matches no arbitrary
// request, and no arbitrary difference.
func TestKnownDifferencesAreNarrow(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	word := func() string {
		letters := make([]byte, 4+rng.IntN(8))
		for i := range letters {
			letters[i] = byte('a' + rng.IntN(26))
		}
		return string(letters)
	}
	requests, details := []string{"", " "}, []string{"", " "}
	for range 100 {
		for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE", "WATCH"} {
			requests = append(requests,
				fmt.Sprintf("%s /%s (%s)", method, word(), word()),
				fmt.Sprintf("%s /api/v1/%s?%s=1 (list)", method, word(), word()),
				fmt.Sprintf("%s /apis/%s/v1/namespaces/diff/%s/%s (%s)", method, word(), word(), word(), word()))
		}
		x, y := word(), word()
		for _, code := range []int{200, 201, 400, 403, 404, 409, 422, 429, 500, 503} {
			details = append(details, fmt.Sprintf("code: %d %s | 418 %s", code, x, y),
				fmt.Sprintf("code: 418 %s | %d %s", x, code, y))
		}
		details = append(details, x, fmt.Sprintf(": %q | %q", x, y), fmt.Sprintf(": 2 of %q | 3 of %q", x, y),
			fmt.Sprintf("header %s: %q | %q", word(), x, y), fmt.Sprintf("header Content-Type: %q | \"\"", x),
			fmt.Sprintf("error: %s | <nil>", x), fmt.Sprintf("error: <nil> | %s", y),
			fmt.Sprintf(".message: %q | %q", x, y), fmt.Sprintf(".code: %q | nothing", x),
			fmt.Sprintf(".metadata.%s: %q | %q", word(), x, y), fmt.Sprintf(".spec.%s: nothing | %q", word(), y),
			fmt.Sprintf("[3].object.%s: %q | nothing", word(), x), fmt.Sprintf(".%s: null | []", word()))
	}
	names := map[string]bool{}
	for _, d := range slices.Concat(known, knownByConfiguration, knownOfAudit) {
		if d.reason == "" || names[d.name] {
			t.Errorf("%q has no reason, or another difference has its name", d.name)
		}
		names[d.name] = true
		if i := slices.IndexFunc(requests, d.request.MatchString); i >= 0 {
			t.Errorf("%q matches the request %q", d.name, requests[i])
		}
		if i := slices.IndexFunc(details, d.detail.MatchString); i >= 0 {
			t.Errorf("%q matches the difference %q", d.name, details[i])
		}
	}
}

// TestMissingDifferencesAreReported checks that a run names the accepted differences that it lacks without a reason.
func TestMissingDifferencesAreReported(t *testing.T) {
	found := &difference{name: "found", request: is(`^GET /a \(`), detail: is(`^code: 200 \| 404`)}
	lost := &difference{name: "lost", request: is(`^GET /b \(`), detail: is(`^code: 200 \| 404`)}
	rare := &difference{name: "rare", request: is(`^GET /c \(`), detail: is(`^code: 200 \| 404`), absence: race}
	p := newReport([]*difference{found, lost, rare})
	send := func(path string, code int) {
		p.compare(&request{method: "GET", path: path}, answer{code: 200}, answer{code: code})
	}
	send("/a", 404)
	send("/b", 200)
	send("/b", 500) // unlike the accepted difference
	if got := p.missing(); len(p.unexplained) != 1 || !slices.Equal(got, []string{"lost"}) {
		t.Errorf("missing %q, %d unexplained", got, len(p.unexplained))
	}
}

// TestOnlyTheConditionDanglingMayDiffer checks that another difference in the status of a FlowSchema is unexplained.
func TestOnlyTheConditionDanglingMayDiffer(t *testing.T) {
	schema := func(conditions, fields string) answer {
		return answer{code: 200, header: http.Header{"Content-Type": {"application/json"}}, body: fmt.Appendf(nil,
			`{"items":[{"metadata":{"name":"a","managedFields":[%s]},"status":{%s}}]}`, fields, conditions)}
	}
	const (
		condition = `"conditions":[{"type":"Dangling","status":"False"}]`
		other     = `"conditions":[{"type":"Dangling","status":"False"},{"type":"Other","status":"False"}]`
		entry     = `{"manager":"api-priority-and-fairness-config-consumer-v1","operation":"Apply"}`
		stranger  = `{"manager":"kubectl","operation":"Apply"}`
	)
	for _, c := range []struct {
		a, b      answer
		explained bool
	}{
		{schema(condition, entry), schema("", ""), true},
		{schema(condition, entry+","+stranger), schema("", stranger), true},
		{schema(other, entry), schema("", ""), false},
		{schema(condition, entry), schema("", stranger), false},
		{schema(condition, entry), schema(`"more":1`, ""), false},
	} {
		p := newReport(known)
		p.compare(&request{method: "GET", path: "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas", about: "list"}, c.a, c.b)
		if len(p.unexplained) == 0 != c.explained {
			t.Errorf("%s | %s: unexplained %v", c.a.body, c.b.body, p.unexplained)
		}
	}
}
