package routing

import (
	"net/url"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func TestSelectorsAreBounded(t *testing.T) {
	for name, c := range map[string]struct {
		query   string
		refused bool
	}{
		"none":                  {"", false},
		"requirements":          {"labelSelector=" + strings.Repeat("!a,", maxSelectorTerms-1) + "b", false},
		"too many requirements": {"labelSelector=" + strings.Repeat("!a,", maxSelectorTerms) + "b", true},
		"too many values":       {"labelSelector=a+in+(" + manyValues() + ",last)", true},
		"too many fields":       {"fieldSelector=" + strings.Repeat("a!=b,", maxSelectorTerms) + "a!=b", true},
		"fields":                {"fieldSelector=metadata.name=a", false},
		"labels and fields at once": {"fieldSelector=a=b&labelSelector=" + strings.Repeat("!a,", maxSelectorTerms-1) + "b",
			true},
	} {
		opts, err := listOptions(&url.URL{RawQuery: c.query})
		if err != nil {
			t.Fatal(err)
		}
		if err := checkSelectors(opts); (err != nil) != c.refused || err != nil && !apierrors.IsBadRequest(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func manyValues() string {
	var b strings.Builder
	for i := range maxSelectorTerms {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString("v" + strings.Repeat("x", i%8) + string(rune('a'+i%26)) + string(rune('a'+i/26%26)) +
			string(rune('a'+i/676%26)))
	}
	return b.String()
}
