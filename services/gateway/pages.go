package gateway

import (
	"encoding/json"
	"net/http"
	"net/http/pprof"
	"slices"
)

// writeJSON writes v indented, as kube-apiserver does for its own pages.
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

// debug serves profiles to those that authorization lets see them.
func debug(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
}
