// Package patchlimit bounds the copies of JSON Patches in every process that imports it.
//
// A JSON Patch of a kilobyte can double its document with each copy operation. The json-patch library has no bound
// unless a program sets one; kube-apiserver sets it in genericapiserver.Config.New (JSONPatchMaxCopyBytes).
// registry applies clients' patches, and admission applies those of mutating webhooks and policies: both import it.
package patchlimit

import jsonpatch "gopkg.in/evanphx/json-patch.v4"

// maxCopyBytes is how many bytes the copy operations of one patch may add to a document together. A patch that copies
// more fails with an AccumulatedCopySizeError. The value is kube-apiserver's.
const maxCopyBytes = 3 << 20

func init() { jsonpatch.AccumulatedCopySizeLimit = maxCopyBytes }
