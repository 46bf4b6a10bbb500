package gateway

import (
	"encoding/json"
	"net/http"
	"slices"
)

// writeJSON writes v as indented JSON, as kube-apiserver does for its own pages.
func writeJSON(w http.ResponseWriter, v any) {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write(b)
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
